"""Chat templates: conversion of conversations with tool calls to tokens, and parsing of the student's turns."""

"""A study that is small in every way."""

STUDY = """
student = "builtin:student"
updates = 2

[data]
limit = 40

[teachers.main]
model = "builtin:teacher"

[sampler]
max_tokens = 12

[learner]
batch_size = 4

[schedule]
kind = "replay"

[task]
reward = "exact"

[runtime]
kind = "inline"
device = "cpu"

[sweep]
title = "Two losses"
seeds = [1, 2]
measure = ["reward/exact", "tokens"]
last = 2
x = "schedule.k"
grid = { schedule.k = [0, 1] }

[sweep.arms.reverse]
loss = { kind = "reverse_kl_mc", m = 4 }

[sweep.arms.forward]
loss.kind = "forward_kl"
loss.k = 8

[[sweep.claims]]
says = "reverse is better"
less = "forward"
than = "reverse"

[[sweep.claims]]
says = "reverse falls"
less = "reverse"
than = 0
slope = true
measure = "tokens"
"""

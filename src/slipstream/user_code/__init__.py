"""User code: import of functions and classes that users write, and the processes that run them."""

"""verl's worker side, the same for every engine of verl: rows in, each prompt computed once, outputs back.

README.md says how a mini-batch goes through it, and what its words mean. First of all: the stock path is verl's own
`forward_backward_batch`, set by the backend so that it computes the model right.
"""

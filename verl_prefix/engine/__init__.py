"""verl's worker side, the same for every engine of verl: rows in, each prompt computed once, outputs back.

README.md says how a mini-batch goes through it, and what its words mean.
"""

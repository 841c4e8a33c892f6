"""Time and memory of a mini-batch without a GPU: the real schedule, model and FSDP2, on fake tensors.

job, hardware    what runs: a rank's groups and options, a path (`Arm`) through them, a GPU's rates
command          `plan --simulate`: a training command as a `Job`, and tables of the result
report           arms side by side, the cheapest settings, the longest rows that fit
depth            a deep model by two smaller ones
passes, model    a rank's passes, as verl's engine runs them, and their model
tower, scans, counted    stand-ins for what asks a tensor for values, or is a GPU's kernel
accelerator      a device "sim" with streams and a clock
tracker, operations      what each operation allocates, computes and waits for
"""

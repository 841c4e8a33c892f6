"""Tools that look at a run, before or after it; nothing of a training run imports them.

    doctor      will verl use this package, and what would run on this machine?
    plan/       what would sharing gain for a training command? Read from its config and data, without a GPU
    simulate/   `plan --simulate`: time and memory of one mini-batch, by the real schedule and model on fake tensors
    ab/         does our engine compute what verl's does? A run's recorded updates, replayed through both
    bench/      how fast is one update, how much memory does it take? Measured, without verl
    report, plots, memory    tables, pictures and memory figures of all of them
    arguments   words of their command lines, and of the examples'

`verl_prefix.cli` reads the command line. A command reads files and options first, and imports torch, transformers or
verl only when they are in order. It makes one dictionary, the report: written as JSON, and from that shown in tables.
"""

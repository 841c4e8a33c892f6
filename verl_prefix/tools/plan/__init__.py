"""`verl-prefix plan`: what sharing prompts would do to a training command, without running it.

script              words of the command, of a shell script that bash expands but does not run
options, compose    the command line, config and train files: read without torch
training_command    its model (shapes alone), its tokenizer, and what the driver would refuse
work, turns         the rows of some training steps: drawn, made up, or as a run dumped them
predict             rows -> ranks and mini-batches -> passes -> seconds and bytes, by the engine's own functions
verdict             is it worth it, and which change gains most?
notes, report       warnings; tables
command, figures    all of this in order, as one report

A plan (`core.plan.Plan`) is what a rank computes of one batch; what the command says is its report.
"""

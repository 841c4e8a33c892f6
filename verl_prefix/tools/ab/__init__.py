"""`verl-prefix ab`: optimizer steps that verl's engine and ours both compute, compared.

    options     the command line             source      the steps: a trace's, or of random rows
    command     a process for each rank      arm         one engine with its weights; how far two of them are apart
    replay      a step through all arms      diagnosis   the first layer in which an arm is off
    verdict     the tolerances               render      the report in words and pictures
    runs        `--runs`: the metrics of two finished runs instead

An arm is verl's own engine (`stock`), ours by one of its schedules, or `truth`, verl's engine one precision above.
"""

"""Tests run tiny models: more threads than one only wait for each other, most of all beside other jobs."""

import torch

torch.set_num_threads(1)

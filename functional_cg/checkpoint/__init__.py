"""Checkpoints: one file for exchange, or a folder of complete checkpoints that a run writes beside its training.

A checkpoint holds leaves under their dotted key paths, and nothing of the structure: the program that made the state
makes it again, and loads the values into it. So it needs no pickle, stays readable when a class is renamed, and can be
read by other programs. By contrast, ``torch.save(fcg.snapshot(state), path)`` also pickles the optimizer's classes and
functions, which ``torch.load`` refuses by default (``weights_only``), and fails on a schedule written as a lambda.
"""

from .one_file import load, save
from .series import Checkpoints, checkpoints
from .state_dicts import load_state_dict, names_of, state_dict

__all__ = ["Checkpoints", "checkpoints", "load", "load_state_dict", "names_of", "save", "state_dict"]

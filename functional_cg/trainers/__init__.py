"""Captured steps for the loops of other libraries: Hugging Face's Trainer, TRL, accelerate and Lightning Fabric."""

from functional_cg.trainers.module_step import ModuleStep as ModuleStep
from functional_cg.trainers.module_step import module_step as module_step

"""Captured steps in the loops of other libraries.

:func:`module_step` serves loops of your own, of accelerate and of Lightning Fabric;
``functional_cg.trainers.hugging_face.CapturedTrainer`` and ``functional_cg.trainers.trl.CapturedSFTTrainer`` are the
trainers of these libraries with a captured step.
"""

from functional_cg.trainers.module_step import ModuleStep as ModuleStep
from functional_cg.trainers.module_step import module_step as module_step

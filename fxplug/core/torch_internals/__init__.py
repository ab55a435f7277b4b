"""The private parts of torch that we stand on: no other file of ours names any.

Each says what we need of torch. We promise none of them to anybody: a name here changes, or goes, with torch's own. What a new
torch breaks, the tests of what stands on it show; tests/test_torch_internals.py has what would show nowhere else.
"""

from .. import warn_if_untested

__all__ = ["ATTRIBUTES", "BACKWARD_HOOKS", "CHECKPOINTS", "CHECKS", "COMPILER", "FAKE_TENSOR_LOG", "SCRIPTED", "TYPED_STORAGE"]

# names that torch gives to things, for code that must not import torch, or looks for them by name
# the logger to which an operation on fake tensors that fails writes its traceback; we need that it is silent when switched off
FAKE_TENSOR_LOG = "torch._subclasses.fake_tensor"
# attributes of a tensor that say what was done with it before; we need that reading one meets a mode of torch functions
ATTRIBUTES = frozenset({"_grad", "_grad_fn", "_version", "_base", "_cdata"})
# attributes of a tensor that hold what will be done in backward; as above
BACKWARD_HOOKS = frozenset({"_backward_hooks", "_post_accumulate_grad_hooks"})
# what torch.utils.checkpoint looks up and calls for a checkpoint that is not reentrant, in one version of torch or another
CHECKPOINTS = ("_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl")
# the method of a tensor that gives its memory as `storage()` does, without a warning
TYPED_STORAGE = "_typed_storage"
# the compiler's module; we need that nothing is compiled where it was not imported
COMPILER = "torch._dynamo"
# the attribute of a scripted function that holds its Python code
SCRIPTED = "_torchdynamo_inline"
# functions of torch whose text is read by people only, but for their first argument; we need their names in a frame's code
CHECKS = frozenset({"_assert", "_check", "_check_value", "_check_type", "_check_index", "_check_not_implemented"})

warn_if_untested("torch")

"""ZhiJian's add-ins, lines and lists; here what add-ins import, and what their lists are made with."""

from .addin import Addin
from .addin_factory import settings
from .base_class import AddinBase
from .host import ModuleView
from .imports import stand_in
from .reuse import model_config, reuse_keys

dict2args = settings  # ZhiJian's name for it
Seen = ModuleView  # its name in earlier versions

__all__ = ["Addin", "AddinBase", "ModuleView", "Seen", "dict2args", "model_config", "reuse_keys", "settings", "stand_in"]

"""ZhiJian's add-ins, lines and lists; here what add-ins import, and what their lists are made with."""

from .addin import Addin
from .base_class import AddinBase
from .host import Seen
from .imports import stand_in
from .making import settings
from .reuse import model_config, reuse_keys

dict2args = settings  # ZhiJian's name for it

__all__ = ["Addin", "AddinBase", "Seen", "dict2args", "model_config", "reuse_keys", "settings", "stand_in"]

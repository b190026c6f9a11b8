"""Workers that are pods: found through the Kubernetes API, registered when they are ready, removed when they end."""

from slime_kubernetes.plugin import Discovery, add_options, make_plugin
from slime_kubernetes.pods import Pod
from slime_kubernetes.settings import Settings

__all__ = ["Discovery", "Pod", "Settings", "add_options", "make_plugin"]

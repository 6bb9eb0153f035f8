"""`MODULE:APP`: imports an app, and says what was meant when there is no such thing."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from idemp.app import App
from idemp.errors import ConfigurationError, IdempError
from idemp.findings import nearest
from idemp.showing import described

if TYPE_CHECKING:
    from types import ModuleType


class NoSuchApp(ConfigurationError):
    """What should name an app as `MODULE:APP` names nothing, or something else."""


def load_app(where: str) -> App:
    """The app that `MODULE:APP` names; the module is looked for in the current directory, too.

    Raises:
        NoSuchApp: it names nothing, or something else; the nearest name is given.
        ConfigurationError: the module can't be imported.

    Example:
        >>> load_app("json")
        Traceback (most recent call last):
        ...
        idemp.loading.NoSuchApp: 'json' is no MODULE:APP, such as shop.orders:app.
    """
    module_name, _, attribute = where.partition(":")
    if not module_name or not attribute:
        raise NoSuchApp(f"{where!r} is no MODULE:APP, such as shop.orders:app.")
    module = _import(module_name)
    found: object = module
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if isinstance(found, App):
        return found
    apps = [name for name, value in vars(module).items() if isinstance(value, App)]
    hint = nearest(attribute, apps) if apps else "There is no App in it."
    if found is None:
        raise NoSuchApp(f"Module {module_name!r} has no {attribute!r}. {hint}")
    raise NoSuchApp(f"{where!r} is no App but a {type(found).__name__}. {hint}")


def _import(name: str) -> ModuleType:
    if not all(name.split(".")):  # such as "../shop" or "shop..orders"
        raise NoSuchApp(
            f"There is no module {name!r}. Write its name as Python imports it, such as shop.orders, in the directory that "
            "holds shop."
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except (IdempError, KeyboardInterrupt, MemoryError):
        raise
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing == name or name.startswith(f"{missing}."):
            raise NoSuchApp(f"There is no module {missing!r}. {_nearest_module(missing)}") from error
        raise ConfigurationError(
            f"Module {name!r} can't be imported: it needs {missing!r}, which is not installed.",
            fix=f"Install {missing!r}.",
        ) from error
    except SystemExit as error:
        raise ConfigurationError(
            f"Module {name!r} can't be imported: it ends the process (SystemExit: {error.code!r}).",
            fix='Call sys.exit() under `if __name__ == "__main__":` only. --traceback shows where it is called.',
        ) from error
    except BaseException as error:
        raise ConfigurationError(
            f"Module {name!r} can't be imported: {described(error)}.", fix="--traceback shows where."
        ) from error


def _nearest_module(name: str) -> str:
    parent, _, _ = name.rpartition(".")
    folders = list(getattr(sys.modules.get(parent), "__path__", [])) if parent else [str(Path.cwd())]
    known = [f"{parent}.{item.name}" if parent else item.name for item in pkgutil.iter_modules(folders)]
    if not parent:
        known += [path.name for path in Path.cwd().iterdir() if path.is_dir() and path.name.isidentifier()]
    return nearest(name, known) if known else "Is this the right directory?"

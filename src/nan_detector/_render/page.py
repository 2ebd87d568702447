"""One HTML file for a log: self-contained, without scripts, and nothing is loaded from anywhere.

Each string of the log is untrusted. It is cleaned of what could steer or reorder text, escaped by the template engine,
and if that failed, a policy in the page still forbids every script, connection and foreign style.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from typing import Any

from nan_detector._digest import Digest
from nan_detector._render.page_view import page_view
from nan_detector._render.palette import DARK, LIGHT, variables
from nan_detector._source_text import clean
from nan_detector._summary import SOURCE
from nan_detector._version import __version__

#: Characters of one string of the log that are shown.
LONGEST = 2000


def page(digest: Digest, name: str) -> str:
    """The page about a log.

    Args:
        digest: The log.
        name: What its user calls it, for the title.

    Raises:
        ImportError: jinja2 or matplotlib is not installed.
    """
    from jinja2 import Environment, FunctionLoader, StrictUndefined
    from markupsafe import Markup

    def shown(value: Any) -> Any:
        if isinstance(value, str) and not isinstance(value, Markup):
            text = clean(value)
            return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
        return value

    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        loader=FunctionLoader(_template),
        finalize=shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = style_sheet()
    return environment.get_template("page.html.jinja").render(
        view=page_view(digest, name),
        style=Markup(style),
        policy=policy(style),
        safe_svg=Markup,
        source=SOURCE,
        version=__version__,
    )


def style_sheet() -> str:
    """The page's style sheet with its colours."""
    names = [name for name in LIGHT if name not in ("ground", "card", "code", "mark")]
    classes = "\n".join(f".fill-{n} {{ fill: var(--{n}); }} .stroke-{n} {{ stroke: var(--{n}); }}" for n in names)
    scheme = (
        f":root {{ color-scheme: light dark; {variables(LIGHT)} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {variables(DARK)} }} }}\n"
    )
    return f"\n{scheme}{_template('page.css')}{classes}\n"


def policy(style: str) -> str:
    """The page's Content-Security-Policy: this one style sheet and nothing else."""
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def _template(name: str) -> str:
    return files(__package__).joinpath("templates", name).read_text(encoding="utf-8")

"""Where notifications go, from section `recovery` of a job file. The secret comes from a file or the environment, so
that the job file, its copy in the run's directory and the journal do not hold it. A URL may be a secret too, and stands
in both files: `without_secret_urls` is what others may see of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rolecall.core.config.job import NotifyConfig, NotifyFormat, RecoveryConfig
from rolecall.core.errors import ConfigError
from rolecall.recovery.notifications.formats import Target, shown_url

SECRET_ENV = "ROLECALL_NOTIFY_SECRET"
SECRET_CHARS_MAX = 4096
DEFAULT_URLS = {
    NotifyFormat.PAGERDUTY: "https://events.pagerduty.com/v2/enqueue",
    NotifyFormat.OPSGENIE: "https://api.opsgenie.com/v2/alerts",
}
_HOSTS = {
    "hooks.slack.com": NotifyFormat.SLACK,
    "events.pagerduty.com": NotifyFormat.PAGERDUTY,
    "events.eu.pagerduty.com": NotifyFormat.PAGERDUTY,
    "api.opsgenie.com": NotifyFormat.OPSGENIE,
    "api.eu.opsgenie.com": NotifyFormat.OPSGENIE,
}
ALERTMANAGER_PATH = "/api/v2/alerts"


def target_of(recovery: RecoveryConfig, environ: Mapping[str, str]) -> Target | None:
    """None: no channel is configured. Raises ConfigError, without any secret: the settings contradict each other, the
    URL is none, or the secret is missing."""
    notify = recovery.notify
    if recovery.webhook_url is not None:
        if notify != NotifyConfig():
            raise ConfigError(["recovery.webhook_url: recovery.notify is set too; set only recovery.notify"])
        notify = NotifyConfig(url=recovery.webhook_url)
    if notify == NotifyConfig():
        return None
    url, secret = notify.url or DEFAULT_URLS.get(notify.format, ""), _secret(notify.secret_file, environ)
    if not url and notify.format is NotifyFormat.SLACK:
        url, secret = secret, ""
        if not url:
            raise ConfigError([f"recovery.notify: set {SECRET_ENV} or secret_file to the URL of the Slack webhook"])
    if not url:
        raise ConfigError(["recovery.notify.url: is missing"])
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        name = "webhook_url" if recovery.webhook_url is not None else "notify.url"
        raise ConfigError([f"recovery.{name}: must be http://host/... or https://host/..."])
    chosen = _format_of(url, notify.format)
    if chosen in DEFAULT_URLS and not secret:
        what = "routing (integration) key" if chosen is NotifyFormat.PAGERDUTY else "API key"
        raise ConfigError([f"recovery.notify: {chosen} needs its {what}: set {SECRET_ENV}, or secret_file"])
    return Target(format=chosen, url=url, secret=secret)


def without_secret_urls(config: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a job file, with the URLs of section `recovery` as `Target.shown` gives them. The values may be
    those of an earlier version, or damaged."""
    recovery = config.get("recovery")
    if not isinstance(recovery, Mapping):
        return dict(config)
    shown = dict(recovery)
    if isinstance(url := recovery.get("webhook_url"), str):
        shown["webhook_url"] = _shown(url, NotifyFormat.AUTO)
    if isinstance(notify := recovery.get("notify"), Mapping) and isinstance(url := notify.get("url"), str):
        shown["notify"] = {**notify, "url": _shown(url, notify.get("format"))}
    return {**config, "recovery": shown}


def _shown(url: str, form: object) -> str:
    try:
        return shown_url(url, _format_of(url, NotifyFormat(str(form))))
    except ValueError:  # no URL, or no format
        return "***"


def _format_of(url: str, chosen: NotifyFormat) -> NotifyFormat:
    if chosen is not NotifyFormat.AUTO:
        return chosen
    parts = urlsplit(url)
    if parts.path.rstrip("/").endswith(ALERTMANAGER_PATH):
        return NotifyFormat.ALERTMANAGER
    return _HOSTS.get(parts.hostname or "", NotifyFormat.WEBHOOK)


def _secret(path: str | None, environ: Mapping[str, str]) -> str:
    """Empty: none is set."""
    if path is None:
        secret, where = environ.get(SECRET_ENV, "").strip(), SECRET_ENV
    else:
        where = "recovery.notify.secret_file"
        try:
            with Path(path).open(encoding="utf-8") as file:
                secret = file.read(SECRET_CHARS_MAX + 1).strip()
        except (OSError, UnicodeDecodeError) as e:
            reason = e.strerror if isinstance(e, OSError) else "not a text"
            raise ConfigError([f"{where}: {path}: {reason}"]) from None
        if not secret:
            raise ConfigError([f"{where}: {path}: is empty"])
    if len(secret) > SECRET_CHARS_MAX or not secret.isascii() or not secret.isprintable() or " " in secret:
        raise ConfigError([f"{where}: must hold one word of printable ASCII"])
    return secret

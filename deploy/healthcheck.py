"""Health check of a container: exit 0 when GET of the URL is answered with a 2xx, and 1 otherwise.

The URL is the first argument, else http://127.0.0.1:30000/health. Certificates are not checked, since the router's
certificate is for another name than 127.0.0.1.
"""

import ssl
import sys
import urllib.request

_DEFAULT_URL = "http://127.0.0.1:30000/health"
_TIMEOUT_S = 4.0


def main(arguments: list[str]) -> int:
    """Check the URL, and return the exit code."""
    url = arguments[0] if arguments else _DEFAULT_URL
    unchecked = ssl.create_default_context()
    unchecked.check_hostname = False
    unchecked.verify_mode = ssl.CERT_NONE
    # No proxy: the router is on this machine.
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=unchecked)
    )
    try:
        with opener.open(url, timeout=_TIMEOUT_S) as answer:
            return 0 if 200 <= answer.status < 300 else 1
    except OSError as error:
        sys.stderr.write(f"{url}: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

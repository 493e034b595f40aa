"""What the checks in Python share: points, each of which prints one line."""

failed = 0


def of(client):
    """A decorator that runs a function at once as the point `CLIENT.NAME`."""
    def point(name):
        def run(check):
            global failed
            try:
                check()
                print(f"ok   {client}.{name}", flush=True)
            except Exception as error:
                failed += 1
                print(f"FAIL {client}.{name} {error!r}", flush=True)
        return run
    return point

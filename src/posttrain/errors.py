"""The one exception for a user's mistake."""


class UserError(Exception):
    """Something to type differently: shown in one or two lines without a traceback, exit status 2."""

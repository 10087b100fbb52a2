"""The one kind of error that bad input may raise: a single line that says where, what and how to mend it."""

from __future__ import annotations


class InputError(ValueError):
    """Bad input from outside: a file, a tensor, a field or a token id.

    The message is one line: place, subject, what was expected, what was found, the mend. Command-line tools
    print it and exit 2; nothing else may be caught that way, so a mistake of ours still shows its traceback.
    """

    def __init__(self, where: object, subject: str, expected: str, found: object, mend: str) -> None:
        self.where, self.subject, self.expected, self.found, self.mend = str(where), subject, expected, found, mend
        message = f"{where}: {subject}: expected {expected}, found {found}; {mend}"
        super().__init__(" ".join(message.split()))

    def __reduce__(self):
        """An exception is pickled by its message alone, and would not come back from another process."""
        return InputError, (self.where, self.subject, self.expected, self.found, self.mend)

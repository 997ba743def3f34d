/* fail.h - one-line errors in a buffer of the caller, for modules that print nothing. */
#ifndef KVANT_TOOLS_FAIL_H
#define KVANT_TOOLS_FAIL_H

#include <stdbool.h>
#include <stddef.h>

/* Writes the line when errlen > 0. Always false, so that a check can be `ok || fail(...)`. */
bool fail(char *err, size_t errlen, const char *format, ...);

#endif /* KVANT_TOOLS_FAIL_H */

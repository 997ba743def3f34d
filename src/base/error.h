/* error.h - writes one-line messages into buffers of callers. Owns no memory, never prints. */
#pragma once

#include <kvant/kvant.h>

#include "attributes.h"

typedef struct kvant_error {
    char *text; /* NULL when the caller wants no message */
    size_t size;
} kvant_error;

/* Formats a message for `error`, which may be NULL, and for kvant_error_message(). The message is
 * cut to fit and always terminated. Returns status, so that callers can write `return
 * kvant_fail(...)`. */
kvant_status kvant_fail(const kvant_error *error, kvant_status status, const char *format, ...)
    KVANT_PRINTF(3, 4);

/* Appends to a string in a buffer of size bytes; cuts silently and always terminates. */
void kvant_append(char *text, size_t size, const char *format, ...) KVANT_PRINTF(3, 4);

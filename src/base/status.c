/* status.c - texts of status codes, the version, error messages per thread. */
#include "error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

const char *kvant_strerror(kvant_status status)
{
    switch (status) {
    case KVANT_OK: return "success";
    case KVANT_ERR_ARGUMENT: return "invalid argument";
    case KVANT_ERR_SPEC: return "the codec spec cannot be read";
    case KVANT_ERR_UNSUPPORTED: return "not supported";
    case KVANT_ERR_MEMORY: return "out of memory";
    case KVANT_ERR_NONFINITE: return "input holds a NaN or an infinity";
    case KVANT_ERR_RANGE: return "input is too large for an fp16 scale";
    case KVANT_ERR_FULL: return "the pool of pages is full";
    case KVANT_ERR_FORMAT: return "bytes do not follow the kvant format";
    case KVANT_ERR_IO: return "a file could not be read or written";
    case KVANT_ERR_CUDA: return "the CUDA runtime reported an error";
    }
    return "unknown status";
}

const char *kvant_version(void)
{
    return KVANT_VERSION_STRING;
}

static _Thread_local char last_message[512];

const char *kvant_error_message(void)
{
    return last_message;
}

kvant_status kvant_fail(const kvant_error *error, kvant_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(last_message, sizeof last_message, format, args);
    va_end(args);
    if (error && error->text && error->size)
        snprintf(error->text, error->size, "%s", last_message);
    return status;
}

void kvant_append(char *text, size_t size, const char *format, ...)
{
    size_t used = strlen(text);
    if (used + 1 >= size)
        return;
    va_list args;
    va_start(args, format);
    vsnprintf(text + used, size - used, format, args);
    va_end(args);
}

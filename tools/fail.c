#include "fail.h"

#include <stdarg.h>
#include <stdio.h>

bool fail(char *err, size_t errlen, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    if (errlen > 0)
        vsnprintf(err, errlen, format, args);
    va_end(args);
    return false;
}

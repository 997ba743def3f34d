/* message.c - error lines and the check that output arrived. */
#include "command.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

bool report_line(const char *prefix, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fputs(prefix, stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    return false;
}

int finish_output(void)
{
    errno = 0;
    if (fflush(stdout) == 0 && !ferror(stdout))
        return EXIT_OK;
    complain("cannot write to standard output: %s",
             errno != 0 ? strerror(errno) : "an earlier write failed");
    return EXIT_RUNTIME;
}

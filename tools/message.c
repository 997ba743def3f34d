/* message.c - error lines and the check that output arrived. */
#include "command.h"

#include "../integrations/llama.cpp/log.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

void print_plain(FILE *out, const char *text)
{
    for (; *text != 0; text++) {
        const size_t n = kvp_control_bytes(text);
        fprintf(out, "%*s", (int)n, "");
        if (n > 0)
            text += n - 1;
        else
            fputc(*text, out);
    }
}

/* A longer line is cut. Paths have at most 4096 bytes. */
#define LINE_BYTES 16384

bool report_line(const char *prefix, const char *format, ...)
{
    char text[LINE_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    fputs(prefix, stderr);
    print_plain(stderr, text);
    fputc('\n', stderr);
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

/* message.c - error lines and the check that output arrived. */
#include "command.h"

#include "../integrations/llama.cpp/log.h"
#include "os.h"

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

bool can_write_file(const char *subject, const char *path)
{
    char folder[4096];
    if (snprintf(folder, sizeof folder, "%s.part", path) >= (int)sizeof folder)
        return complain("%s: the path of the file to write is too long", subject);
    if (os_is_folder(path))
        return complain("%s: %s is a folder: name a file in it", subject, path);
    const size_t n = (size_t)(kvant_os_file_name(path) - path); /* with the slash */
    folder[n > 1 ? n - 1 : n] = 0;
    if (n == 0)
        strcpy(folder, ".");
    if (os_can_write_to(folder))
        return true;
    return complain("%s: cannot write to the folder %s: %s", subject, folder, strerror(errno));
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

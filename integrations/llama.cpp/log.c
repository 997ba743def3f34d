/* log.c - see log.h. A message is formatted first and written in one call, so lines of different
 * threads do not mix. Control characters in it, as in a variable's value, become spaces. So it
 * stays in one line and cannot change a terminal. */
#include "log.h"

#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "host.h"

static atomic_bool verbose, quiet;
static _Thread_local bool said_why; /* since the graph began */

void kvp_log_set(bool be_verbose, bool be_quiet)
{
    atomic_store(&verbose, be_verbose);
    atomic_store(&quiet, be_quiet);
}

static void write_line(const char *format, va_list arguments)
{
    char text[1024];

    vsnprintf(text, sizeof(text), format, arguments);
    for (char *at = text; *at != '\0';) {
        const size_t n = kvp_control_bytes(at);
        memset(at, ' ', n);
        at += n > 0 ? n : 1;
    }
    fprintf(stderr, "kvant: %s\n", text);
}

void kvp_error(const char *format, ...)
{
    va_list arguments;

    said_why = true;
    va_start(arguments, format);
    write_line(format, arguments);
    va_end(arguments);
}

void kvp_log_graph_begins(void)
{
    said_why = false;
    errno = 0;
}

/* Functions that allocate are many levels below a graph, and return no reason. The C library says
 * in errno that there was no memory. */
int32_t kvp_log_graph_ends(int32_t status, const char *device)
{
    if (status != 0 && !said_why && errno == ENOMEM)
        kvp_error("%s: out of memory for a graph, so its tokens are refused; free memory and try "
                  "again",
                  device);
    return status;
}

void kvp_info(const char *format, ...)
{
    va_list arguments;

    if (atomic_load(&quiet))
        return;
    va_start(arguments, format);
    write_line(format, arguments);
    va_end(arguments);
}

void kvp_note(const char *format, ...)
{
    va_list arguments;

    if (!atomic_load(&verbose))
        return;
    va_start(arguments, format);
    write_line(format, arguments);
    va_end(arguments);
}

void kvp_report(const char *event)
{
    const char *name = kvant_os_variable("KVANT_WATCH");

    if (name != NULL)
        kvp_host_send(name, event);
}

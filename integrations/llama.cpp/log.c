#define _GNU_SOURCE /* SOCK_CLOEXEC */
/* log.c - see log.h. A message is formatted first and written in one call, so lines of different
 * threads do not mix. */
#include "log.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

static atomic_bool verbose, quiet;

void kvp_log_set(bool be_verbose, bool be_quiet)
{
    atomic_store(&verbose, be_verbose);
    atomic_store(&quiet, be_quiet);
}

static void write_line(const char *format, va_list arguments)
{
    char text[1024];

    vsnprintf(text, sizeof(text), format, arguments);
    fprintf(stderr, "kvant: %s\n", text);
}

void kvp_error(const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    write_line(format, arguments);
    va_end(arguments);
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

/* The socket's name is abstract, because its first byte is 0: no file has to be removed. A program
 * may close every descriptor that it inherits, so an inherited pipe would not do. */
void kvp_report(const char *event)
{
    const char *name = getenv("KVANT_WATCH");
    struct sockaddr_un to = { .sun_family = AF_UNIX };
    const size_t n = name != NULL ? strlen(name) : 0;
    int out;

    if (n == 0 || n >= sizeof(to.sun_path))
        return;
    memcpy(to.sun_path + 1, name, n);
    out = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (out < 0)
        return;
    (void)!sendto(out, event, strlen(event), MSG_DONTWAIT | MSG_NOSIGNAL, (struct sockaddr *)&to,
                  (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + n));
    close(out);
}

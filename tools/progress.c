/* progress.c - share done and time left on stderr. */
#define _POSIX_C_SOURCE 200809L
#include "progress.h"

#include <stdio.h>
#include <time.h>
#include <unistd.h>

#define TERMINAL_SECONDS 0.1
#define LINE_SECONDS 5.0

double monotonic_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

void progress_start(progress *p, double total)
{
    const double now = monotonic_seconds();
    *p = (progress){ .total = total, .started = now, .shown = now, .terminal = isatty(STDERR_FILENO) == 1 };
}

void progress_add(progress *p, double amount, const char *what)
{
    const double now = monotonic_seconds();
    p->done += amount;
    if (now - p->shown < (p->terminal ? TERMINAL_SECONDS : LINE_SECONDS))
        return;
    p->shown = now;
    p->visible = true;
    const double share = p->total > 0 ? p->done / p->total : 1;
    const double left = share > 0 ? (now - p->started) * (1 - share) / share : 0;
    const unsigned seconds = (unsigned)(left > 0 ? left + 0.5 : 0);
    fprintf(stderr, "%s%3.0f %%  %u:%02u left  %s%s", p->terminal ? "\r\033[K" : "", 100 * share, seconds / 60,
            seconds % 60, what, p->terminal ? "" : "\n");
    fflush(stderr);
}

void progress_end(progress *p)
{
    if (p->terminal && p->visible)
        fputs("\r\033[K", stderr);
    p->visible = false;
}

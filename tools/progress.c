/* progress.c - share done and time left on stderr. */
#define _POSIX_C_SOURCE 200809L
#include "progress.h"

#include "json.h"
#include "os.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define TERMINAL_SECONDS 0.1
#define LINE_SECONDS 5.0
#define JSON_SECONDS 1.0

static bool json;

double monotonic_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

int64_t monotonic_milliseconds(void)
{
    return (int64_t)(1000 * monotonic_seconds());
}

bool progress_use_json(void *wanted, const char *value)
{
    (void)value;
    return json = *(bool *)wanted = true;
}

/* Never beyond 1: work that was not foreseen (a cache filled again) only takes longer. */
static double share_done(const progress *p)
{
    return p->done < p->total ? p->done / p->total : 1;
}

/* NaN until something is done. */
static double seconds_left(const progress *p, double now)
{
    const double share = share_done(p);
    return share > 0 ? (now - p->started) * (1 - share) / share : NAN;
}

/* Rounded, because nobody needs microseconds of an estimate. */
static void print_number(FILE *out, const char *key, double value, double step)
{
    fprintf(out, "\"%s\":", key);
    json_number(out, round(value / step) * step);
    putc(',', out);
}

/* Written at once, so that lines of several processes do not mix. Without memory a line is left
 * out. */
static void print_json(const progress *p, double now, const char *what)
{
    os_stream stream;
    if (!os_stream_open(&stream))
        return;
    FILE *out = stream.file;
    putc('{', out);
    print_number(out, "done", p->done, 1);
    print_number(out, "total", p->total, 1);
    print_number(out, "fraction", share_done(p), 1e-6);
    print_number(out, "elapsed_s", now - p->started, 1e-3);
    print_number(out, "remaining_s", seconds_left(p, now), 1e-3);
    fputs("\"what\":", out);
    json_string(out, what);
    fputs("}\n", out);
    char *line = os_stream_text(&stream, NULL);
    if (line != NULL)
        fputs(line, stderr);
    free(line);
}

static void print_line(const progress *p, double now, const char *what)
{
    const double left = seconds_left(p, now);
    const unsigned seconds = (unsigned)(left > 0 ? left + 0.5 : 0);
    fprintf(stderr, "%s%3.0f %%  ", p->terminal ? "\r\033[K" : "", 100 * share_done(p));
    if (seconds >= 3600)
        fprintf(stderr, "%u:", seconds / 3600);
    fprintf(stderr, seconds >= 3600 ? "%02u:%02u left  %s%s" : "%u:%02u left  %s%s",
            seconds / 60 % 60, seconds % 60, what, p->terminal ? "" : "\n");
}

static void show(progress *p, double now, const char *what)
{
    p->shown = now;
    p->visible = true;
    if (p->json)
        print_json(p, now, what);
    else
        print_line(p, now, what);
    fflush(stderr);
}

void progress_start(progress *p, double total)
{
    const double now = monotonic_seconds();
    *p = (progress){
        .total = total, .started = now, .shown = now, .terminal = os_errors_on_terminal()
    };
    p->json = json && !p->terminal;
    if (p->json)
        show(p, now, "started");
}

void progress_add(progress *p, double amount, const char *what)
{
    const double now = monotonic_seconds();
    p->done += amount;
    if (now - p->shown >= (p->json ? JSON_SECONDS : p->terminal ? TERMINAL_SECONDS : LINE_SECONDS))
        show(p, now, what);
}

void progress_end(progress *p)
{
    if (p->json)
        show(p, monotonic_seconds(), p->done < p->total ? "stopped" : "done");
    else if (p->terminal && p->visible)
        fputs("\r\033[K", stderr);
    p->visible = false;
}

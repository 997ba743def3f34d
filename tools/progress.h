/* progress.h - the progress of long work, on stderr. For people: one rewritten line on a terminal,
 * otherwise a line every few seconds. For programs: one JSON object per line.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

typedef struct progress {
    double total, done;
    double started, shown; /* seconds */
    bool terminal, json, visible;
} progress;

/* A clock that never jumps. */
double monotonic_seconds(void);
int64_t monotonic_milliseconds(void);

/* From now on, the whole process prints progress as JSON objects, unless stderr is a terminal,
 * where a person reads it:
 *   {"done":512,"total":4096,"fraction":0.125,"elapsed_s":1.5,"remaining_s":10.5,
 *    "what":"turboquant-4"}
 * in one line, one object at the start, about one per second, and one at the end. Each command has
 * its own unit for done and total; remaining_s is null until something is done. For option tables:
 * sets *wanted, a bool, and returns true. */
bool progress_use_json(void *wanted, const char *value);

/* total: any unit of work of which every step costs about the same. */
void progress_start(progress *p, double total);
void progress_add(progress *p, double amount, const char *what);

/* Removes the line, so that results do not start in the middle of it. */
void progress_end(progress *p);

/* progress.h - how far long work is, on stderr: one line rewritten on a terminal, a line every few seconds
 * elsewhere. */
#ifndef KVANT_TOOLS_PROGRESS_H
#define KVANT_TOOLS_PROGRESS_H

#include <stdbool.h>

typedef struct progress {
    double total, done;
    double started, shown; /* seconds */
    bool terminal, visible;
} progress;

/* Seconds of a clock that never jumps. */
double monotonic_seconds(void);

/* total: any unit of work of which every step costs about the same. */
void progress_start(progress *p, double total);
void progress_add(progress *p, double amount, const char *what);

/* Removes the line, so that results do not start in the middle of it. */
void progress_end(progress *p);

#endif /* KVANT_TOOLS_PROGRESS_H */

/* report_child.h - runs a subcommand of this program, keeps its JSON output and follows its
 * progress. */
#ifndef KVANT_TOOLS_REPORT_CHILD_H
#define KVANT_TOOLS_REPORT_CHILD_H

#include "progress.h"

#include <cjson/cJSON.h>

typedef struct child_result {
    int code;    /* exit code; 128 + n after signal n */
    cJSON *rows; /* an array, or NULL when it printed none; the caller deletes it */
    double seconds;
} child_result;

/* arguments: "eval", ..., NULL, with --json among them. As the child gets on, up to `share` is
 * added to progress, and all of it when it ends well; its other messages pass through. Ctrl-C is
 * passed on once, so that the child prints what is complete. False after complaining that it could
 * not be run. */
bool child_run(const char *const *arguments, progress *progress, double share, const char *what,
               child_result *result);

#endif /* KVANT_TOOLS_REPORT_CHILD_H */

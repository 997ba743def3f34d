/* log.h - messages of the plug-in: one line per message, on stderr, with the plug-in's name in
 * front.
 *
 * Errors and warnings always appear. Lines of kvp_info appear unless KVANT_QUIET=1, notes only with
 * KVANT_VERBOSE=1. `kvant exec` wants to know what becomes of the plug-in: `kvp_report` tells it.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "attributes.h"

/* The bytes of the control character at `at`, which could change a terminal; 0: it is no control
 * character. In UTF-8 the characters U+0080 to U+009F have two bytes. */
static inline size_t kvp_control_bytes(const char *at)
{
    const unsigned char *byte = (const unsigned char *)at;

    return byte[0] < 0x20 || byte[0] == 0x7f ? 1 : byte[0] == 0xc2 && byte[1] >> 5 == 4 ? 2 : 0;
}

void kvp_log_set(bool verbose, bool quiet);
void kvp_error(const char *format, ...) KVANT_PRINTF(1, 2);
void kvp_info(const char *format, ...) KVANT_PRINTF(1, 2);
void kvp_note(const char *format, ...) KVANT_PRINTF(1, 2);

/* Around the computation of a graph. If it failed for lack of memory, and no error was printed on
 * this thread, `kvp_log_graph_ends` prints a line. Returns the status. */
void kvp_log_graph_begins(void);
int32_t kvp_log_graph_ends(int32_t status, const char *device);

/* Sends "loaded", "refused" or "context" to the process that KVANT_WATCH names. Does nothing when
 * no process listens. */
void kvp_report(const char *event);

/* log.h - messages of the plug-in: one line per message, on stderr, with the plug-in's name in
 * front.
 *
 * Errors and warnings always appear. Lines of kvp_info appear unless KVANT_QUIET=1, notes only with
 * KVANT_VERBOSE=1. `kvant exec` wants to know what becomes of the plug-in: `kvp_report` tells it.
 */
#pragma once

#include <stdbool.h>

#include "attributes.h"

void kvp_log_set(bool verbose, bool quiet);
void kvp_error(const char *format, ...) KVP_PRINTF(1, 2);
void kvp_info(const char *format, ...) KVP_PRINTF(1, 2);
void kvp_note(const char *format, ...) KVP_PRINTF(1, 2);

/* Sends "loaded", "refused" or "context" to the process that KVANT_WATCH names. Does nothing when
 * no process listens. */
void kvp_report(const char *event);

/* log.h - messages of the plug-in: one line per message, on stderr, with the plug-in's name in
 * front.
 *
 * Errors always appear. Notes appear with KVANT_VERBOSE=1.
 */
#ifndef KVP_LOG_H
#define KVP_LOG_H

#include <stdbool.h>

#include "attributes.h"

void kvp_log_set_verbose(bool verbose);
void kvp_error(const char *format, ...) KVP_PRINTF(1, 2);
void kvp_note(const char *format, ...) KVP_PRINTF(1, 2);

#endif /* KVP_LOG_H */

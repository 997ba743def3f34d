/* report_file.h - the raw results of `kvant report`, a JSON file beside the page:
 *
 *   { "kvant_report": 1, "complete": true,
 *     "about": { "kvant", "runtime", "machine", "threads", "model", "model_file", "model_fingerprint", "n_ctx_train", "text",
 *                "text_fingerprint", "ctx", "calibration", "date" },
 *     "steps": [ { "name": "quality", "command": "kvant eval ...", "state": "complete", "seconds": 12.5, "rows": [ {...}, ... ] } ] }
 *
 * Rows are what the command of the step printed. A file is checked as far as the program reads it;
 * the page takes what it knows and shows the rest as not measured.
 */
#ifndef KVANT_TOOLS_REPORT_FILE_H
#define KVANT_TOOLS_REPORT_FILE_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stdio.h>

/* Writes a file beside its place and renames it. False after complaining; an older one stays
 * then. */
bool report_file_replace(const char *path, void (*write)(FILE *file, const void *user), const void *user);

/* NULL after complaining. The caller deletes it. */
cJSON *report_file_load(const char *path);
bool report_file_save(const char *path, const cJSON *results);

/* NULL without memory. */
cJSON *report_file_new(void);

/* Of the "about" object; "" where there is none. */
const char *report_file_about(const cJSON *results, const char *key);

/* The step of that name, or NULL. */
cJSON *report_file_step(const cJSON *results, const char *name);

/* Replaces or adds a step; rows, an array or NULL, is taken over. False without memory. */
bool report_file_set_step(cJSON *results, const char *name, const char *command, const char *state, double seconds,
                          cJSON *rows);

/* Whether the step was completed by that very command. */
bool report_file_has(const cJSON *results, const char *name, const char *command);

#endif /* KVANT_TOOLS_REPORT_FILE_H */

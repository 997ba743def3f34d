/* model_file.h - which model a process runs: the one whose file it has mapped into memory. */
#ifndef KVP_MODEL_FILE_H
#define KVP_MODEL_FILE_H

#include <stdbool.h>

#define KVP_MODEL_PATH 1024u

/* Writes the path of the file, at most KVP_MODEL_PATH bytes. False when no model is mapped, or
 * several, of which a context may run any. */
bool kvp_find_model(char *model);

#endif /* KVP_MODEL_FILE_H */

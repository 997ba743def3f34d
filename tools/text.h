/* text.h - texts that commands are given by name. */
#ifndef KVANT_TOOLS_TEXT_H
#define KVANT_TOOLS_TEXT_H

#include <stddef.h>

/* In place of a file: kvant's own manual, for those who have no text at hand. */
#define MANUAL_TEXT "kvant:manual"

/* The whole file ("-" is stdin) with a 0 behind it, to be freed; NULL after complaining. */
char *read_text(const char *path, size_t *bytes);

#endif /* KVANT_TOOLS_TEXT_H */

/* cache_type.h - the type of a cache by ggml's name, for programs that take it as an argument. */
#ifndef CACHE_TYPE_H
#define CACHE_TYPE_H

#include <stdlib.h>
#include <string.h>

#include "ggml.h"

/* Ends the program when ggml has no such type. */
static inline enum ggml_type type_of(const char *name)
{
    for (int i = 0; i < GGML_TYPE_COUNT; i++)
        if (ggml_type_name((enum ggml_type)i) != NULL &&
            strcmp(ggml_type_name((enum ggml_type)i), name) == 0)
            return (enum ggml_type)i;
    exit(2);
}

#endif

/* registry.c - finds codec families by name and lists them, from families.h. */
#include <pthread.h>
#include <string.h>

#include "../base/abi.h"
#include "codec_internal.h"
#include "families.h"

#define DECLARE(name) extern const kvant_family kvant_family_##name;
KVANT_FAMILIES(DECLARE)

#define ENTRY(name) &kvant_family_##name,
static const kvant_family *const families[] = { KVANT_FAMILIES(ENTRY) };

#define N_FAMILIES (sizeof families / sizeof families[0])

const kvant_family *kvant_family_find(const char *name)
{
    for (size_t i = 0; i < N_FAMILIES; i++)
        if (strcmp(families[i]->name, name) == 0)
            return families[i];
    return NULL;
}

size_t kvant_codec_family_count(void)
{
    return N_FAMILIES;
}

/* The listings of option tables are made once. */
static struct {
    char own[160], common[320];
} listings[N_FAMILIES];

static void list_options(void)
{
    for (size_t i = 0; i < N_FAMILIES; i++) {
        kvant_options_list(families[i]->options, listings[i].own, sizeof listings[i].own);
        if (families[i]->common)
            kvant_options_list(families[i]->common, listings[i].common, sizeof listings[i].common);
    }
}

kvant_status kvant_codec_family_get(size_t index, kvant_codec_family *family)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    KVANT_RETURN_IF(index >= N_FAMILIES, KVANT_ERR_ARGUMENT);
    pthread_once(&once, list_options);
    const kvant_family *f = families[index];
    const kvant_codec_family filled = { .name = f->name,
                                        .variants = f->variants,
                                        .options = listings[index].own,
                                        .common_options = listings[index].common,
                                        .source = f->source,
                                        .summary = f->summary };
    return KVANT_RETURN_STRUCT(kvant_codec_family, family, &filled, summary) ? KVANT_OK
                                                                             : KVANT_ERR_ARGUMENT;
}

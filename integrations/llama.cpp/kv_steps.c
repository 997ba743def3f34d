/* kv_steps.c - see kv_steps.h. */
#include "kv_steps.h"

#include "../../src/store/rules.h"
#include "host.h"

kvant_step_pages *kvp_steps_none(void)
{
    static kvant_step_pages none = { .size = sizeof(none) };

    return &none;
}

size_t kvp_steps_bytes(const kvp_kv_shape *shape, const kvp_settings *settings)
{
    const size_t rows = (size_t)kvp_kv_blocks(shape) * KVANT_PAGE_TOKENS;

    if (shape->in_order || kvp_kv_exact(shape, settings, 1).step == 0)
        return 0;
    return (rows < KVANT_EXACT_STEP ? rows : KVANT_EXACT_STEP) * shape->row * sizeof(uint16_t);
}

void kvp_steps_join(kvp_steps *steps, kvp_kv *kv)
{
    const size_t bytes = kvp_steps_bytes(&kv->shape, kv->settings);

    steps->pages.size = sizeof(steps->pages);
    steps->pages.bytes = bytes > steps->pages.bytes ? bytes : steps->pages.bytes;
    kv->steps = bytes > 0 ? steps : NULL;
}

bool kvp_steps_map(kvp_kv *kv)
{
    kvant_step_pages *pages = &kv->steps->pages;

    if (pages->memory != NULL)
        return true;
    pages->memory = kvp_host_reserve(pages->bytes);
    if (pages->memory != NULL && !kvp_host_commit(pages->memory, pages->bytes))
        kvp_steps_free(kv->steps);
    kv->shared = pages->memory != NULL ? pages->bytes : 0;
    return pages->memory != NULL;
}

void kvp_steps_free(kvp_steps *steps)
{
    if (steps->pages.memory != NULL)
        kvp_host_release(steps->pages.memory, steps->pages.bytes);
    steps->pages.memory = NULL;
}

/* record_copy.c - see record_copy.h. */
#include "record_copy.h"

#include <string.h>

#include "host.h"

kvant_status kvp_record_copy_create(const kvant_codec *const *codecs, uint32_t n_kv_heads,
                                    uint32_t n_blocks, kvp_record_copy *copy)
{
    /* All rows may be exact; codecs alone would ask for no exact pages. */
    const uint32_t rows = n_blocks * KVANT_PAGE_TOKENS;
    const kvant_exact_part exact = {
        .size = sizeof(exact), .newest = rows, .total = rows, .step = KVANT_PAGE_TOKENS
    };
    const kvant_tensor_params params = { .size = sizeof(params),
                                         .codecs = codecs,
                                         .n_kv_heads = n_kv_heads,
                                         .n_sequences = 1,
                                         .n_blocks = n_blocks,
                                         .n_open_blocks = n_blocks,
                                         .exact = &exact };
    size_t bytes = 0;
    kvant_status status;

    *copy = (kvp_record_copy){ 0 };
    if (codecs == NULL)
        return KVANT_ERR_MEMORY;
    status = kvant_tensor_size(&params, &bytes);
    if (status != KVANT_OK)
        return status;
    bytes = (bytes + KVANT_PAGE_ALIGN - 1) / KVANT_PAGE_ALIGN * KVANT_PAGE_ALIGN;
    copy->memory = kvant_os_alloc(KVANT_PAGE_ALIGN, bytes);
    if (copy->memory == NULL)
        return KVANT_ERR_MEMORY;
    memset(copy->memory, 0, bytes);
    return kvant_tensor_create(&params, copy->memory, &copy->tensor);
}

void kvp_record_copy_free(kvp_record_copy *copy)
{
    kvant_tensor_free(&copy->tensor);
    kvant_os_free(copy->memory);
    *copy = (kvp_record_copy){ 0 };
}

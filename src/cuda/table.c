/* table.c - the only symbol that libkvant_cuda.so exports. */
#include "table.h"

KVANT_API kvant_cuda_table_get_fn kvant_cuda_table_get;

const kvant_cuda_table *kvant_cuda_table_get(void)
{
    static const kvant_cuda_table table = { .version = KVANT_CUDA_TABLE_VERSION,
                                            .size = sizeof table,
                                            .view_bytes = sizeof(kvant_codec_view),
                                            .info_bytes = sizeof(kvant_codec_info),
                                            .args_bytes = KVANT_CUDA_ARGS_BYTES,
#define KVANT_CUDA_TABLE_ENTRY(result, name, parameters) .name = kvant_cuda_table_##name,
                                            KVANT_CUDA_TABLE_FUNCTIONS(KVANT_CUDA_TABLE_ENTRY)
#undef KVANT_CUDA_TABLE_ENTRY
    };
    return &table;
}

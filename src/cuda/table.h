/* table.h - the functions in libkvant's table (device/cuda_table.h): kvant_cuda_table_<name>, not
 * exported. */
#pragma once

#include "../device/cuda_table.h"
#include "params.h"

KVANT_BEGIN_C

#define KVANT_CUDA_TABLE_DECLARE(result, name, parameters)                                         \
    result kvant_cuda_table_##name parameters;
KVANT_CUDA_TABLE_FUNCTIONS(KVANT_CUDA_TABLE_DECLARE)
#undef KVANT_CUDA_TABLE_DECLARE

KVANT_END_C

/* state_mocks.h - the parts of the plug-in that state.c calls, for programs without llama.cpp: a
 * cache whose head_dim is known, in the computer's memory, and a state that is neither measured nor
 * packed. */
#pragma once

#include <stdlib.h>

#include "../../integrations/llama.cpp/kv_store.h"
#include "../../integrations/llama.cpp/kv_tensor.h"
#include "../../integrations/llama.cpp/llama_states.h"
#include "../../integrations/llama.cpp/state_restore.h"

bool kvp_kv_ready(kvp_kv *kv)
{
    return kv->tensor != NULL;
}

void kvp_kv_count(kvp_kv *kv)
{
}

bool kvp_saving_measures(void)
{
    return false;
}

void kvp_saving_note(const void *at, size_t kept, size_t room)
{
    (void)at, (void)kept, (void)room;
}

uint8_t *kvp_saving_begin(uint8_t *at, size_t kept, size_t room)
{
    (void)kept, (void)room;
    return at;
}

void kvp_saving_end(bool done)
{
    if (!done)
        abort();
}

bool kvp_restoring_is_checked(const void *bytes, size_t n)
{
    (void)bytes, (void)n;
    return false;
}

const bool *kvp_restoring_fillers(const void *bytes, size_t *n)
{
    (void)bytes, (void)n;
    return NULL;
}

/* The state that is being restored; 0: the plug-in is not told. No other sequence has tokens. */
static unsigned mock_state;

unsigned kvp_restoring_number(bool *alone)
{
    *alone = mock_state != 0;
    return mock_state;
}

kvant_status kvp_state_restore_remote(kvp_state_restored *r)
{
    abort(); /* the rows are in the computer's memory */
}

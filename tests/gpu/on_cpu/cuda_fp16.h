// For NCCL's header, which asks for it and uses nothing of it.
#pragma once

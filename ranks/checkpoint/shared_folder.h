// Whether all ranks mean the same folder by a path.
#pragma once

#include <string>

#include "holdfast/collectives/collective.h"
#include "holdfast/coord/storage/file_system.h"

namespace holdfast {

// Collective. Rank 0 makes a file in `folder` and the others look for it; a file system may take a few
// seconds to show it. USAGE, naming a rank, when one does not see it. The file has a partial name and is
// removed again.
Status agree_that_all_see(Collective& collective, FileSystem& files, const std::string& folder);

}  // namespace holdfast

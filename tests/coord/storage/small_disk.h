// A disk of its own, small enough to be filled. Only root may mount one.
#pragma once

#include <sys/mount.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "coord/temp_dir.h"

namespace holdfast {

class SmallDisk {
 public:
  // `size` as of tmpfs, e.g. "1M".
  explicit SmallDisk(const std::string& size) {
    const std::string options = "size=" + size + ",mode=0700";
    if (mount("tmpfs", folder_.path().c_str(), "tmpfs", 0, options.c_str()) != 0) why_ = std::strerror(errno);
  }
  ~SmallDisk() {
    if (mounted()) umount2(folder_.path().c_str(), MNT_DETACH);
  }
  SmallDisk(const SmallDisk&) = delete;
  SmallDisk& operator=(const SmallDisk&) = delete;

  bool mounted() const { return why_.empty(); }
  std::string why_not() const { return "a small disk cannot be mounted here, which takes root: " + why_; }
  const std::string& path() const { return folder_.path(); }
  std::string operator/(const std::string& name) const { return folder_ / name; }

 private:
  TempDir folder_;
  std::string why_;
};

}  // namespace holdfast

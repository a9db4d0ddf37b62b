// manifest.json: what manifest.pb says, for people and other programs.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace holdfast {

class BundleManifest;
class LayerAttempt;

// Fields that are present, by their names in evidence.proto. Enums and stages by name, digests in
// hexadecimal, NaN and the infinities as "nan", "inf" and "-inf". Text is as it is: dump it with
// error_handler_t::replace.
nlohmann::ordered_json manifest_json(const BundleManifest& manifest, const std::string& content_id);

// One attempt of a trend, in the same way.
nlohmann::ordered_json layers_json(const LayerAttempt& attempt);

}  // namespace holdfast

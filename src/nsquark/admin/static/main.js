// What every page loads. Each module looks for what it serves and does nothing where that is absent.
import { connect } from "./events.js";
import "./chart.js";
import "./confirm.js";
import "./copy.js";
import "./keys.js";
import "./palette.js";
import "./sparkline.js";
import "./times.js";

if (document.body.dataset.live !== undefined) connect();

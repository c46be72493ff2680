// Every page loads this. Each module looks for the elements that it serves and does nothing where there are none.
import { connect } from "./events.js";
import "./chart.js";
import "./confirm.js";
import "./copy.js";
import "./keys.js";
import "./palette.js";
import "./sparkline.js";
import "./times.js";

if (document.body.dataset.live !== undefined) connect();
